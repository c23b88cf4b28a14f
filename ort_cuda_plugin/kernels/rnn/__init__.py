"""Kernels of recurrent networks: RNN, GRU and LSTM."""
