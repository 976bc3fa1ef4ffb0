"""What people look at: plans, runs, the web page and the terminal.

Reads plans and event files; the training loop may import it, it does not import the loop.
"""
