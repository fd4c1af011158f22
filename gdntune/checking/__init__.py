"""The truth in fp64, the inputs, and the gate that every variant passes."""
