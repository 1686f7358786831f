"""Reports: sentences, tables and provenance, made of findings alone."""
