"""What memory costs in time: the curve of time against budget, and the largest batch within a budget."""
