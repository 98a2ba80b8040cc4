"""What the package asks of the machine that it runs on, and of files that others may have made.

* `absent`: hides a package from another package that would import it
* `drawing`: pictures by matplotlib, which the package runs without
* `driver`: what the NVIDIA driver says without use of a GPU
* `foreign`: files that anybody may have made, read within bounds and shown in messages
* `interrupts`: holds Ctrl-C back while modules are imported
* `openssl`: where OpenSSL 3 is, which groups on several machines need
* `storage`: a folder whose files nobody else has written

`flashmoe.jit` compiles kernels and `flashmoe.nvshmem` finds NVSHMEM.
"""
