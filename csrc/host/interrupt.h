// How the host's waits learn that the user wants to end them.
#pragma once

namespace flashmoe::host {

// The thread that waits for the group to form, or for a call to end, calls this some tens of times a second. An
// exception from it ends the wait. The bindings set it when the library is loaded, before there is a second thread.
inline void (*check_interrupt)() = [] {};

}  // namespace flashmoe::host
