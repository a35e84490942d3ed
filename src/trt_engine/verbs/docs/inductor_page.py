"""`docs reference/inductor`: the operators of the backend `inductor`, written from its importer's table."""

from __future__ import annotations


def inductor_page() -> str:
    """The page in Markdown."""
    from trt_engine.backends.inductor.operators import OPERATORS, operators_text

    return f"""# Inductor operators

The {len(OPERATORS)} operators of ONNX's default domain that the importer computes, each with the attributes that it honours
with any value. Limits: [TorchInductor](../inductor.md#operators).

{operators_text()}
"""
