"""How is the weighted average computed?"""
