// How the host's waits learn that the user wants them to end.
#pragma once

namespace flashmoe::host {

// Called some tens of times a second by the thread that waits for the group to form or for a call to end; what it throws
// ends the wait. The bindings set it when the library is loaded, before there is a second thread.
inline void (*check_interrupt)() = [] {};

}  // namespace flashmoe::host
