"""What survives from before the segment?"""
