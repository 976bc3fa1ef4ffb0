"""`Trainer`, for whoever brings a model and a data set and does not want a loop.

Stands on `config` and `setup`. Begin with `trainer.py`.
"""
