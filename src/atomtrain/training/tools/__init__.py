"""Commands beside training: doctor, export, evaluation, a look at data.

Stands on `setup`. Each module is a way in.
"""
