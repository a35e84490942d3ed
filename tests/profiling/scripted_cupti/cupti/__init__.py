"""A scripted stand-in for `cupti-python`: the calls we make, and the rules they keep."""
