"""How does a sublayer's output join the stream?"""
