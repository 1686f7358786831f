"""What is said of a candidate: drifts, verdicts, tables, figures, the index of the documents, and what made them."""
