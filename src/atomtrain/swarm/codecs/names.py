"""The names of the codecs, for those who only ask whether there is one; see `codec`."""

from atomtrain.settings import one_of

CODEC_NAMES = FLOAT16, FLOAT32, INT8, INT4, TOPK = "float16", "float32", "int8", "int4", "topk"
"""All names, the default first."""
check_codec_name = one_of(CODEC_NAMES, "wire format")
"""Refuses a name that is not among them."""
