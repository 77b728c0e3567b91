"""Which tokens may a query see?"""
