"""Attention kernels: multi-pass, FlashAttention, split-KV and linear attention, and K/V caches."""
