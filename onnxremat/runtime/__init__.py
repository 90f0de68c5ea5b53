"""Running an artifact on ONNX Runtime: sessions, the capped arena, measured memory, training."""
