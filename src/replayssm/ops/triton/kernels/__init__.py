"""The kernels: functions that Triton compiles. What launches them is one level up."""
