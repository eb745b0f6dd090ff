"""A stream in object storage: compressed immutable objects that prove themselves."""
