"""Pretrain a decoder from random weights on raw text."""
