"""A decoder layer's small operations in C, compiled on the host where it has a compiler; never needed."""
