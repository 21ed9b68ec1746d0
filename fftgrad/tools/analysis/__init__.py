"""What `analyze` is made of: the sample, its figures, what codecs make of it, and what follows."""
