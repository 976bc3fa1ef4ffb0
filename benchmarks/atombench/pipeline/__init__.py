"""The pipeline that ATOM is compared with, and what it would take on a link."""
