// What torch.ops does for any schema (names, defaults, boxing) takes as long as a small layer. The calls here go
// through the dispatcher all the same, so autograd, autocast, transforms and dispatch modes see them. What sees a call
// before that, in Python, is left to torch.ops: tracing, modes for functions, subclasses of tensors.
#include "direct_calls.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <algorithm>
#include <array>

#include "composite.h"
#include "linear.h"

namespace mha_ext {
namespace {

// Reads one positional argument after the other; `ok` turns false at one of another type than the very one expected.
class Reader {
 public:
  explicit Reader(PyObject* const* arguments) : next_(arguments) {}

  void read(at::Tensor& tensor) {
    PyObject* given = *next_++;
    if (THPVariable_CheckExact(given)) {
      tensor = THPVariable_Unpack(given);
    } else {
      ok = ok && given == Py_None;
    }
  }

  void read(int64_t& number) {
    PyObject* given = *next_++;
    if (!PyLong_CheckExact(given)) {
      ok = false;
      return;
    }
    int overflow = 0;
    number = PyLong_AsLongLongAndOverflow(given, &overflow);
    ok = ok && overflow == 0;
  }

  void read(bool& flag) {
    PyObject* given = *next_++;
    flag = given == Py_True;
    ok = ok && PyBool_Check(given);
  }

  void read(double& number) {
    PyObject* given = *next_++;
    ok = ok && PyFloat_CheckExact(given);
    if (ok) number = PyFloat_AS_DOUBLE(given);
  }

  bool ok = true;

 private:
  PyObject* const* next_;
};

bool is_watched_in_python() { return at::impl::torch_function_mode_enabled() || torch::jit::tracer::isTracing(); }

int64_t shared_inputs(const LayerArguments& a) {
  if (!a.key.is_same(a.value)) return kSeparateInputs;
  return a.query.is_same(a.key) ? kSharedAll : kSharedKeyValue;
}

// Query, key, value, parameters, masks and seed; embed_dim, which is all that the operator does not need; the numbers.
constexpr Py_ssize_t kNumLayerArguments = 16;

// Whether the arguments are what their types in the operator's schema are, dense, and of the width that is expected.
bool read_layer(PyObject* const* arguments, LayerArguments& a) {
  Reader reader(arguments);
  for (at::Tensor* tensor : {&a.query, &a.key, &a.value, &a.in_proj_weight, &a.in_proj_bias, &a.out_proj_weight,
                             &a.out_proj_bias, &a.attn_mask, &a.key_padding_mask, &a.dropout_seed}) {
    reader.read(*tensor);
  }
  int64_t embed_dim = 0;
  reader.read(embed_dim);
  reader.read(a.num_heads);
  reader.read(a.num_kv_heads);
  reader.read(a.batch_first);
  reader.read(a.dropout_p);
  reader.read(a.causal);
  if (!reader.ok || !a.in_proj_weight.defined() || !a.out_proj_weight.defined()) return false;
  for (const at::Tensor* tensor : {&a.query, &a.key, &a.value}) {
    if (!tensor->defined() || tensor->is_nested() || tensor->layout() != at::kStrided) return false;
  }
  a.shared_inputs = shared_inputs(a);
  return a.query.dim() == 3 && a.query.sym_size(2) == embed_dim;
}

// The result of `compute`, or None where torch.ops is to be asked: it tells an argument that does not fit.
template <typename Compute>
PyObject* call_or_none(const Compute& compute) {
  try {
    return compute();
  } catch (const c10::ValueError&) {
    Py_RETURN_NONE;
  } catch (const c10::TypeError&) {
    Py_RETURN_NONE;
  }
}

template <typename Compute>
PyObject* call_layer(PyObject* const* arguments, const Compute& compute) {
  LayerArguments a;
  if (is_watched_in_python() || !read_layer(arguments, a)) Py_RETURN_NONE;
  return call_or_none([&] { return compute(a); });
}

// Whether they are tensors of four axes, one batch and as many heads each: what needs no other word from the caller.
bool read_attention(PyObject* const* arguments, AttentionArguments& a) {
  Reader reader(arguments);
  const std::array<at::Tensor*, 3> tensors{&a.query, &a.key, &a.value};
  for (at::Tensor* tensor : tensors) reader.read(*tensor);
  reader.read(a.causal);
  return reader.ok && std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor* t) {
           return t->defined() && !t->is_nested() && t->layout() == at::kStrided && t->dim() == 4 &&
                  t->sym_size(0) == a.query.sym_size(0) && t->sym_size(1) == a.query.sym_size(1);
         });
}

void check_count(const char* function, Py_ssize_t expected, Py_ssize_t given) {
  TORCH_CHECK_TYPE(given == expected, function, ": there must be ", expected, " arguments, got ", given);
}

PyObject* multi_head_attention(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count("multi_head_attention", kNumLayerArguments, count);
  return call_layer(arguments, [](const LayerArguments& a) {
    at::Tensor out;
    {
      const pybind11::gil_scoped_release no_gil;
      out = std::get<0>(call_multi_head_attention(a));
    }
    return THPVariable_Wrap(std::move(out));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* multi_head_attention_with_weights(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count("multi_head_attention_with_weights", kNumLayerArguments + 1, count);
  const bool average = arguments[kNumLayerArguments] == Py_True;
  return call_layer(arguments, [average](const LayerArguments& a) {
    AttentionResult results;
    {
      const pybind11::gil_scoped_release no_gil;
      results = mha_ext::multi_head_attention_with_weights(a, average);
    }
    auto& [out, weights] = results;
    return pybind11::make_tuple(pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(out))),
                                pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(weights))))
        .release()
        .ptr();
  });
  END_HANDLE_TH_ERRORS
}

PyObject* attention(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count("attention", 4, count);
  AttentionArguments a;
  if (is_watched_in_python() || !read_attention(arguments, a)) Py_RETURN_NONE;
  return call_or_none([&a] {
    at::Tensor out;
    {
      const pybind11::gil_scoped_release no_gil;
      out = std::get<0>(call_attention(a));
    }
    return THPVariable_Wrap(std::move(out));
  });
  END_HANDLE_TH_ERRORS
}

PyObject* linear(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  check_count("linear", 3, count);
  Reader reader(arguments);
  std::array<at::Tensor, 3> tensors;
  for (at::Tensor& tensor : tensors) reader.read(tensor);
  const auto& [input, weight, bias] = tensors;
  if (is_watched_in_python() || !reader.ok || !input.defined() || !weight.defined()) Py_RETURN_NONE;
  std::optional<at::Tensor> out;
  {
    const pybind11::gil_scoped_release no_gil;
    out = fast_linear(input, weight, bias);
  }
  if (!out.has_value()) Py_RETURN_NONE;
  return THPVariable_Wrap(std::move(*out));
  END_HANDLE_TH_ERRORS
}

template <typename Function>
PyMethodDef method(const char* name, Function* function, const char* doc) {
  // The cast through void(*)() is that of Python's documentation.
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, doc};
}

std::array<PyMethodDef, 5> methods{
    {method("attention", attention, "The operator's output, or None: torch.ops has to be asked."),
     method("multi_head_attention", multi_head_attention, "The operator's output, or None: torch.ops has to be asked."),
     method("multi_head_attention_with_weights", multi_head_attention_with_weights,
            "Output and weights of the layer's steps, or None: they have to be taken one by one."),
     method("linear", linear,
            "The linear map by a product of its own, or None: torch.nn.functional.linear has to do it."),
     {nullptr, nullptr, 0, nullptr}}};

}  // namespace

void add_direct_calls(PyObject* module) {
  if (PyModule_AddFunctions(module, methods.data()) != 0) throw pybind11::error_already_set();
}

}  // namespace mha_ext
