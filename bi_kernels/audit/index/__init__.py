"""The index of the documents: what each found, op × relation as a picture and as tables, and which are current."""
