"""TensorDicts, arrays and objects as columns, and back."""
