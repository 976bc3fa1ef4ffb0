"""Weights in safetensors files: where each is, how it is called there, what it is made of.

Stands on nothing of `models`. Begin with `files.py`.
"""
