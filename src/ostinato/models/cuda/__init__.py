"""The kernels of the layer program on a GPU: sources, launch shapes, libraries, tunings."""
