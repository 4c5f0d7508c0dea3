"""What can be done with the models of a run?

Score new rows, train a new model every day, and use the towers of a retrieval model.
"""
