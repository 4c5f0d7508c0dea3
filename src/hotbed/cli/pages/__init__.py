"""How do data, runs and plans look as text, JSON and HTML?"""
