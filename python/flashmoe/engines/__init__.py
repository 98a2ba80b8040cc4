"""What computes the calls of a context: the CPU engine or the CUDA engine, behind one interface (`base.Engine`)."""
