"""What a user may say, and the recipe that follows from it.

Begin with `options.py` and `recipe.py`.
"""
