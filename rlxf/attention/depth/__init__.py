"""How many times is a token processed?"""
