"""What all kernels share: launching, PDL, lanes, paged addresses, Philox."""
