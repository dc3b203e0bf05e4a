"""A checkpoint as a Hugging Face directory: which weights under which names, their bytes, and where they go."""
