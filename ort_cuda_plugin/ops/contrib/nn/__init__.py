"""Fused operators, normalizations, convolutions and transforms of com.microsoft."""
