/* Lets Python find and load the library as a module; ctypes calls what is in it. */

#define Py_LIMITED_API 0x030b0000
#include <Python.h>

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_library", "The C library, called through ctypes.", -1, NULL,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__library(void) { return PyModule_Create(&definition); }
