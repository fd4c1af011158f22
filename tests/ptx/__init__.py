"""CUDA kernels without a GPU: an interpreter of the PTX that they compile to. See README.md."""
