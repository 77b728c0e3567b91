"""How does order enter?"""
