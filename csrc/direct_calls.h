// The layer called from Python by position, past the parser of schemas.
#pragma once

#include <Python.h>

namespace mha_ext {

// Adds the functions to the module mha_ext._C.
void add_direct_calls(PyObject* module);

}  // namespace mha_ext
