"""Artifacts for any ONNX Runtime: training kernels in standard operators, the order of the nodes in data edges."""
