"""What silos report beside their models: the data summary and metrics."""
