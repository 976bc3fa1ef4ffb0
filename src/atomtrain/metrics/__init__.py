"""Numbers of a run for other programs: TensorBoard, Weights & Biases, trackio, Prometheus."""
