"""Ties the optimizer to DeepSpeed ZeRO: layouts, placement, exchange, binding."""
