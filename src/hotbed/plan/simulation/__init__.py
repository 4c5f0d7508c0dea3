"""How long would a training step take on hardware that is not present?"""
