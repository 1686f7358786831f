"""What is said of a candidate: drifts, verdicts, tables, figures, and what made them."""
