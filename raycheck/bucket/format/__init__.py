"""What the objects of a run hold, as values and as bytes: keys, documents, the index. It knows no store."""
