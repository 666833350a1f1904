"""Conversion of TensorDicts, arrays and objects to columns, and back."""
