// The kernels as operations of MLX: lazy, on its CPU stream, with arrays that cross from and to Python as its own do.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>

#include "attention.h"
#include "block.h"
#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "pool.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace treadle {
namespace {

using Arrays = std::vector<mx::array>;
using Task = std::function<void()>;

// An operation. `prepare` gives the outputs their memory and returns what will be done on MLX's CPU thread; until then
// MLX keeps the memory of the inputs.
class Kernel : public mx::Primitive {
 public:
  using Prepare = std::function<Task(const Arrays&, Arrays&)>;

  Kernel(const char* name, Prepare prepare)
      : Primitive(mx::default_stream(mx::Device::cpu)), name_(name), prepare_(std::move(prepare)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    Task task = prepare_(inputs, outputs);
    if (outputs[0].size() > 0) {
      mx::cpu::get_command_encoder(stream()).dispatch(std::move(task));
    }
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("Treadle's CPU kernels do not run on a GPU.");
  }

  const char* name() const override { return name_; }

 private:
  const char* name_;
  Prepare prepare_;
};

// One with a single output.
template <class F>
mx::array operation(const char* name, mx::Shape shape, Arrays inputs, F prepare) {
  auto kernel = std::make_shared<Kernel>(name, [prepare](const Arrays& in, Arrays& out) { return Task(prepare(in, out[0])); });
  return mx::array(std::move(shape), mx::float32, std::move(kernel), std::move(inputs));
}

void require(bool holds, const char* otherwise) {
  if (!holds) {
    throw std::invalid_argument(otherwise);
  }
}

void require_floats(const mx::array& x) {
  require(x.dtype() == mx::float32, "the array must be float32");
}

void allocate(mx::array& out) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
}

// Memory for [rows, heads, length, dim] that lies as [rows, length, heads, dim]: so model files put it together again
// without a copy.
void allocate_heads(mx::array& out) {
  int64_t heads = out.shape(1), length = out.shape(2), dim = out.shape(3);
  mx::Strides strides{heads * length * dim, dim, heads * dim, 1};
  bool plain = length == 1 || heads == 1;
  out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), strides, {true, plain, false});
}

// The memory of an input that nobody else will read, or new memory.
void reuse_or_allocate(const mx::array& in, mx::array& out) {
  if (in.is_donatable() && in.flags().row_contiguous && in.nbytes() == out.nbytes()) {
    out.copy_shared_buffer(in);
  } else {
    allocate(out);
  }
}

// An array's floats without gaps, on MLX's CPU thread: its own memory, or a copy that lives as long as this.
class Dense {
 public:
  explicit Dense(const mx::array& x) : Dense(x, x.flags().row_contiguous) {}

  Dense(const mx::array& x, bool as_it_is) : data_(x.data<float>()), shape_(x.shape()), strides_(x.strides()) {
    if (!as_it_is) {
      copy_.reset(new float[x.size()]);
    }
  }

  const float* get() const {
    if (!copy_) {
      return data_;
    }
    float* to = copy_.get();
    fill(0, data_, to);
    return copy_.get();
  }

 private:
  void fill(size_t axis, const float* from, float*& to) const {
    if (axis == shape_.size()) {
      *to++ = *from;
      return;
    }
    for (int i = 0; i < shape_[axis]; ++i) {
      fill(axis + 1, from + i * strides_[axis], to);
    }
  }

  const float* data_;
  mx::Shape shape_;
  mx::Strides strides_;
  std::shared_ptr<float[]> copy_;
};

// [rows, heads, length, dim], where only the last axis must be without gaps; a copy where it is not.
class HeadsOf {
 public:
  explicit HeadsOf(const mx::array& x) : dense_(x, plain(x)), strides_(x.strides()) {
    if (!plain(x)) {
      int64_t item = x.shape(3), head = item * x.shape(2);
      strides_ = {head * x.shape(1), head, item, 1};
    }
  }

  Heads get() const { return {dense_.get(), strides_[0], strides_[1], strides_[2]}; }

 private:
  static bool plain(const mx::array& x) { return x.strides()[3] == 1 || x.shape(3) == 1; }

  Dense dense_;
  mx::Strides strides_;
};

Kind kind_of(const mx::array& x) {
  if (x.dtype() == mx::float16) {
    return Kind::Float16;
  }
  if (x.dtype() == mx::bfloat16) {
    return Kind::BFloat16;
  }
  require(x.dtype() == mx::float32, "weights and scales must be float32, float16 or bfloat16");
  return Kind::Float32;
}

Form form_of(const mx::array& weight, int bits) {
  if (bits == 4) {
    return Form::Affine4;
  }
  if (bits == 8) {
    return Form::Affine8;
  }
  switch (kind_of(weight)) {
    case Kind::Float16: return Form::Float16;
    case Kind::BFloat16: return Form::BFloat16;
    default: return Form::Float32;
  }
}

mx::array product(const mx::array& x, Linear layer, Arrays inputs) {
  require_floats(x);
  require(x.ndim() > 0 && x.shape(-1) == layer.inputs, "the last axis of x must be as long as the rows of weights");
  mx::Shape shape = x.shape();
  shape.back() = layer.outputs;
  bool quantised = layer.form == Form::Affine4 || layer.form == Form::Affine8;
  return operation("TreadleLinear", shape, std::move(inputs), [layer, quantised](const Arrays& in, mx::array& out) {
    allocate(out);
    for (size_t i = 1; i < in.size(); ++i) {
      require(in[i].flags().row_contiguous, "weights must have no gaps");
    }
    Linear own = layer;
    size_t next = 1;
    own.weight = in[next++].data<void>();
    if (quantised) {
      own.scales = in[next++].data<void>();
      own.biases = in[next++].data<void>();
    }
    own.bias = next < in.size() ? in[next].data<float>() : nullptr;
    int rows = out.size() / own.outputs;
    return [own, rows, x = Dense(in[0]), y = out.data<float>()] {
      Product product{own, y};
      multiply(&product, 1, x.get(), own.inputs, rows);
    };
  });
}

Linear plain(const mx::array& weight) {
  require(weight.ndim() == 2, "weights must be a matrix");
  Linear layer{};
  layer.form = form_of(weight, 0), layer.outputs = weight.shape(0), layer.inputs = weight.shape(1);
  return layer;
}

Linear packed(const mx::array& weight, const mx::array& scales, const mx::array& biases, int group, int bits) {
  require(bits == 4 || bits == 8, "weights must have 4 or 8 bits");
  require(group >= BLOCK && group % BLOCK == 0, "groups must be whole multiples of 32");
  require(weight.ndim() == 2 && weight.dtype() == mx::uint32, "codes must be a matrix of uint32");
  int inputs = weight.shape(1) * 32 / bits;
  mx::Shape groups{weight.shape(0), inputs / group};
  require(inputs % group == 0 && scales.shape() == groups && biases.shape() == groups, "scales do not fit the codes");
  require(scales.dtype() == biases.dtype(), "scales and biases must be of one type");
  Linear layer{};
  layer.form = form_of(weight, bits), layer.outputs = weight.shape(0), layer.inputs = inputs;
  layer.group = group, layer.kind = kind_of(scales);
  return layer;
}

mx::array linear(const mx::array& x, const mx::array& weight, const std::optional<mx::array>& bias) {
  Arrays inputs{x, weight};
  if (bias) {
    require_floats(*bias);
    inputs.push_back(*bias);
  }
  return product(x, plain(weight), std::move(inputs));
}

mx::array quantised_linear(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& biases, int group, int bits, const std::optional<mx::array>& bias) {
  Arrays inputs{x, weight, scales, biases};
  if (bias) {
    require_floats(*bias);
    inputs.push_back(*bias);
  }
  return product(x, packed(weight, scales, biases, group, bits), std::move(inputs));
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  require_floats(x);
  require(x.ndim() > 0, "x must have an axis");
  Arrays inputs{x};
  if (weight) {
    require_floats(*weight);
    require(weight->ndim() == 1 && weight->shape(0) == x.shape(-1), "the weight must be as long as the last axis of x");
    inputs.push_back(*weight);
  }
  return operation("TreadleNorm", x.shape(), std::move(inputs), [eps](const Arrays& in, mx::array& out) {
    reuse_or_allocate(in[0], out);
    if (in.size() > 1) {
      require(in[1].flags().row_contiguous, "weights must have no gaps");
    }
    const float* weight = in.size() > 1 ? in[1].data<float>() : nullptr;
    int width = out.shape(-1);
    int64_t rows = width ? out.size() / width : 0;
    return [=, x = Dense(in[0]), y = out.data<float>()] { normalise(x.get(), weight, eps, rows, width, y); };
  });
}

mx::array swiglu(const mx::array& gates, const mx::array& ups) {
  require_floats(gates);
  require_floats(ups);
  require(gates.shape() == ups.shape(), "gate and up must have one shape");
  return operation("TreadleGate", gates.shape(), {gates, ups}, [](const Arrays& in, mx::array& out) {
    reuse_or_allocate(in[0], out);
    int64_t count = out.size();
    return [count, g = Dense(in[0]), u = Dense(in[1]), y = out.data<float>()] { gate(g.get(), u.get(), count, y); };
  });
}

Positions::Kind kind_of_positions(const mx::array& offset, int rows, int length) {
  require(offset.dtype() == mx::int32, "positions must be int32");
  if (offset.ndim() == 2) {
    require(offset.shape(0) == rows && offset.shape(1) == length, "there must be a position for each item of each row");
    return Positions::Kind::PerItem;
  }
  require(offset.size() == 1 || (offset.ndim() == 1 && offset.shape(0) == rows),
          "there must be one position, or one for each row");
  return offset.size() == 1 ? Positions::Kind::Shared : Positions::Kind::PerRow;
}

mx::array rope(const mx::array& x, int dims, bool traditional, float base, float scale, const mx::array& offset,
               const std::optional<mx::array>& freqs) {
  require_floats(x);
  require(x.ndim() == 4, "x must be [rows, heads, length, dim]");
  require(dims > 0 && dims % 2 == 0 && dims <= x.shape(3), "an even number of dims up to the size of a head can turn");
  auto kind = kind_of_positions(offset, x.shape(0), x.shape(2));
  Arrays inputs{x, offset};
  if (freqs) {
    require_floats(*freqs);
    require(freqs->ndim() == 1 && freqs->shape(0) == dims / 2, "there must be a frequency for each pair of dims");
    inputs.push_back(*freqs);
  }
  return operation("TreadleRope", x.shape(), std::move(inputs), [=](const Arrays& in, mx::array& out) {
    allocate(out);
    for (size_t i = 1; i < in.size(); ++i) {
      require(in[i].flags().row_contiguous, "positions and frequencies must have no gaps");
    }
    const float* freqs = in.size() > 2 ? in[2].data<float>() : nullptr;
    int rows = out.shape(0), heads = out.shape(1), length = out.shape(2), dim = out.shape(3);
    Positions positions{kind, in[1].data<int32_t>()};
    return [=, x = HeadsOf(in[0]), y = out.data<float>()] {
      auto frequencies = frequencies_of(dims, base, freqs, scale);
      int64_t head = int64_t(length) * dim;
      rotate({x.get(), rows, heads, length, dim, {dims / 2, traditional, frequencies.data()}, positions},
             {y, heads * head, head, dim});
    };
  });
}

// Of packed rows [rows or more, shared, columns or more, ..] the first `rows` and `columns`: codes of 8 bits in uint32,
// scales and biases. The size of a group.
int require_packed(const Arrays& packed, int rows, int shared, int columns, int dim) {
  require(packed.size() == 3, "packed rows are codes, scales and biases");
  for (const auto& x : packed) {
    require(x.ndim() == 4 && x.shape(0) >= rows && x.shape(1) == shared && x.shape(2) >= columns,
            "packed rows do not fit the others");
  }
  const auto &codes = packed[0], &scales = packed[1], &biases = packed[2];
  require(codes.dtype() == mx::uint32 && codes.shape(3) * 4 == dim, "codes must be of 8 bits in uint32");
  require(scales.dtype() == mx::bfloat16 && biases.dtype() == mx::bfloat16, "scales and biases must be bfloat16");
  int groups = scales.shape(3);
  require(groups > 0 && biases.shape(3) == groups && dim % (groups * LANES) == 0, "scales do not fit the codes");
  return dim / groups;
}

template <class T>
HeadsAs<T> packed_heads(const mx::array& x, int per_element) {
  require(x.strides()[3] == 1 || x.shape(3) == 1, "packed rows must have no gaps in the last axis");
  const auto& s = x.strides();
  return {static_cast<const T*>(x.data<void>()), s[0] * per_element, s[1] * per_element, s[2] * per_element};
}

PackedHeads packed_heads(const Arrays& in, size_t first, int group) {
  return {packed_heads<uint8_t>(in[first], 4), packed_heads<Brain>(in[first + 1], 1),
          packed_heads<Brain>(in[first + 2], 1), group};
}

// `packed_keys` and `packed_values`: none, or each codes, scales and biases, of which the first `num_packed` columns come
// before those of `keys` and `values`.
mx::array attention(const mx::array& queries, const mx::array& keys, const mx::array& values, float scale, bool causal,
                    const std::optional<mx::array>& mask, const Arrays& packed_keys, const Arrays& packed_values,
                    int num_packed) {
  for (const auto* x : {&queries, &keys, &values}) {
    require_floats(*x);
    require(x->ndim() == 4, "queries, keys and values must be [rows, heads, length, dim]");
  }
  int rows = queries.shape(0), heads = queries.shape(1), n = queries.shape(2), dim = queries.shape(3);
  int shared = keys.shape(1), columns = keys.shape(2), value_dim = values.shape(3);
  require(keys.shape(0) == rows && values.shape(0) == rows && values.shape(1) == shared && values.shape(2) == columns &&
              keys.shape(3) == dim && heads % shared == 0,
          "queries, keys and values do not fit each other");
  require(dim % LANES == 0 && value_dim % LANES == 0, "the size of a head must be a multiple of 8");
  Attention p{};
  p.rows = rows, p.heads = heads, p.shared = shared, p.num_queries = n, p.columns = columns + num_packed;
  p.packed = num_packed, p.dim = dim, p.value_dim = value_dim, p.scale = scale;
  p.mask.kind = causal ? Mask::Kind::Causal : Mask::Kind::None;
  Arrays inputs{queries, keys, values};
  require(num_packed >= 0, "there cannot be fewer than no packed columns");
  if (num_packed > 0) {
    p.packed_keys.group = require_packed(packed_keys, rows, shared, num_packed, dim);
    p.packed_values.group = require_packed(packed_values, rows, shared, num_packed, value_dim);
    inputs.insert(inputs.end(), packed_keys.begin(), packed_keys.end());
    inputs.insert(inputs.end(), packed_values.begin(), packed_values.end());
  }
  bool masked = mask.has_value();
  if (mask) {
    require(!causal && mask->ndim() == 4, "a mask must be [rows, heads, queries, columns], and takes the place of causal");
    require(mask->dtype() == mx::bool_ || mask->dtype() == mx::float32, "a mask must be of bools or of float32");
    mx::Shape whole{rows, heads, n, p.columns};
    for (int axis = 0; axis < 4; ++axis) {
      require(mask->shape(axis) == whole[axis] || mask->shape(axis) == 1, "the mask does not fit queries and keys");
    }
    p.mask.kind = mask->dtype() == mx::bool_ ? Mask::Kind::Boolean : Mask::Kind::Additive;
    inputs.push_back(*mask);
  }
  return operation("TreadleAttention", {rows, heads, n, value_dim}, std::move(inputs), [p, masked](const Arrays& in, mx::array& out) {
    allocate_heads(out);
    Attention own = p;
    if (p.packed) {
      own.packed_keys = packed_heads(in, 3, p.packed_keys.group);
      own.packed_values = packed_heads(in, 6, p.packed_values.group);
    }
    if (masked) {
      const mx::array& seen = in.back();
      auto stride = [&](int axis) { return seen.shape(axis) == 1 ? 0 : seen.strides()[axis]; };
      own.mask.data = seen.data<void>();
      own.mask.row = stride(0), own.mask.head = stride(1), own.mask.query = stride(2), own.mask.column = stride(3);
    }
    return [own, q = HeadsOf(in[0]), k = HeadsOf(in[1]), v = HeadsOf(in[2]), y = out.data<float>()] {
      Attention all = own;
      all.queries = q.get(), all.keys = k.get(), all.values = v.get();
      attend(all, y);
    };
  });
}

// A decoder layer's weights, which were evaluated, and their numbers.
class Layer {
 public:
  // `weights`: for each of q, k, v, o, gate, up and down the arrays that `linear` or `quantised_linear` takes.
  Layer(std::vector<Arrays> weights, std::vector<int> groups, std::vector<int> bits, std::vector<bool> biased,
        Arrays norms, Arrays head_norms, float eps, float head_eps, int heads, int shared, int dims, bool traditional,
        float base, float scale, const std::optional<mx::array>& freqs)
      : kept_(std::make_shared<Kept>()) {
    Block& b = kept_->block;
    Linear* members[] = {&b.query, &b.key, &b.value, &b.out, &b.gate, &b.up, &b.down};
    require(weights.size() == 7 && groups.size() == 7 && bits.size() == 7 && biased.size() == 7, "there are 7 products");
    require(norms.size() == 2 && (head_norms.empty() || head_norms.size() == 2), "norms come in pairs");
    for (int i = 0; i < 7; ++i) {
      *members[i] = member(weights[i], groups[i], bits[i], biased[i]);
    }
    b.size = b.query.inputs, b.heads = heads, b.shared = shared, b.dim = b.query.outputs / heads;
    b.before = norm(norms[0], eps, b.size), b.behind = norm(norms[1], eps, b.size);
    b.query_norm = b.key_norm = {nullptr, 0};
    if (!head_norms.empty()) {
      b.query_norm = norm(head_norms[0], head_eps, b.dim), b.key_norm = norm(head_norms[1], head_eps, b.dim);
    }
    b.traditional = traditional;
    b.frequencies = frequencies_of(dims, base, freqs ? keep<float>(*freqs) : nullptr, scale);
    require(b.query.outputs == heads * b.dim && b.key.outputs == shared * b.dim && b.value.outputs == shared * b.dim &&
                dims <= b.dim && b.key.inputs == b.size && b.value.inputs == b.size && b.out.inputs == heads * b.dim &&
                b.out.outputs == b.size && b.gate.inputs == b.size && b.up.inputs == b.size &&
                b.gate.outputs == b.up.outputs && b.down.inputs == b.gate.outputs && b.down.outputs == b.size,
            "the layer's products do not fit each other");
  }

  std::vector<mx::array> asked(const mx::array& x, const mx::array& offset) const {
    const Block& b = kept_->block;
    require_hidden(x);
    int rows = x.shape(0), length = x.shape(1);
    auto kind = kind_of_positions(offset, rows, length);
    auto kernel = std::make_shared<Kernel>("TreadleAsk", [kept = kept_, kind](const Arrays& in, Arrays& out) -> Task {
      for (auto& one : out) {
        allocate_heads(one);
      }
      require(in[1].flags().row_contiguous, "positions must have no gaps");
      int rows = in[0].shape(0), length = in[0].shape(1);
      Positions positions{kind, in[1].data<int32_t>()};
      return [=, x = Dense(in[0]), q = out[0].data<float>(), k = out[1].data<float>(), v = out[2].data<float>()] {
        ask(kept->block, x.get(), rows, length, positions, q, k, v);
      };
    });
    mx::Shape shared{rows, b.shared, length, b.dim};
    return mx::array::make_arrays({{rows, b.heads, length, b.dim}, shared, shared},
                                  {mx::float32, mx::float32, mx::float32}, kernel, {x, offset});
  }

  mx::array rest_of(const mx::array& x, const mx::array& attended) const {
    const Block& b = kept_->block;
    require_hidden(x);
    require_floats(attended);
    int rows = x.shape(0), length = x.shape(1);
    require(attended.shape() == mx::Shape({rows, b.heads, length, b.dim}), "what was attended does not fit");
    auto turned = mx::swapaxes(attended, 1, 2);
    return operation("TreadleRest", x.shape(), {x, turned}, [kept = kept_](const Arrays& in, mx::array& out) {
      allocate(out);
      int tokens = in[0].shape(0) * in[0].shape(1);
      return [=, x = Dense(in[0]), attended = Dense(in[1]), y = out.data<float>()] {
        // Taken when it is needed, not when the operation is put in line: so layers do not hold theirs all at once.
        auto space = mx::allocator::malloc(rest_space(kept->block, tokens) * sizeof(float));
        rest(kept->block, x.get(), attended.get(), tokens, static_cast<float*>(space.buffer().raw_ptr()), y);
      };
    });
  }

 private:
  struct Kept {
    Block block;
    Arrays arrays; // whose memory the block points to
  };

  template <class T>
  const T* keep(const mx::array& a) {
    require(a.is_available() && a.flags().row_contiguous, "weights must be evaluated and have no gaps");
    kept_->arrays.push_back(a);
    return a.data<T>();
  }

  Norm norm(const mx::array& weight, float eps, int size) {
    require_floats(weight);
    require(weight.ndim() == 1 && weight.shape(0) == size, "a norm's weight must be as long as what it norms");
    return {keep<float>(weight), eps};
  }

  Linear member(const Arrays& arrays, int group, int bits, bool biased) {
    std::optional<mx::array> bias;
    if (biased) {
      bias = arrays.back();
    }
    bool codes = bits != 0;
    require(arrays.size() == size_t((codes ? 3 : 1) + biased), "a product has weights, scales and biases, and its bias");
    Linear w = codes ? packed(arrays[0], arrays[1], arrays[2], group, bits) : plain(arrays[0]);
    w.weight = keep<void>(arrays[0]);
    if (codes) {
      w.scales = keep<void>(arrays[1]), w.biases = keep<void>(arrays[2]);
    }
    if (bias) {
      require_floats(*bias);
      w.bias = keep<float>(*bias);
    }
    return w;
  }

  void require_hidden(const mx::array& x) const {
    require_floats(x);
    require(x.ndim() == 3 && x.shape(2) == kept_->block.size, "the hidden state must be [rows, length, size]");
  }

  std::shared_ptr<Kept> kept_;
};

} // namespace

NB_MODULE(TREADLE_MODULE, m) {
  m.def("linear", &linear, nb::arg("x"), nb::arg("weight"), nb::arg("bias").none() = nb::none());
  m.def("quantised_linear", &quantised_linear, nb::arg("x"), nb::arg("weight"), nb::arg("scales"), nb::arg("biases"),
        nb::arg("group"), nb::arg("bits"), nb::arg("bias").none() = nb::none());
  m.def("rms_norm", &rms_norm, nb::arg("x"), nb::arg("weight").none(), nb::arg("eps"));
  m.def("swiglu", &swiglu, nb::arg("gate"), nb::arg("up"));
  m.def("rope", &rope, nb::arg("x"), nb::arg("dims"), nb::arg("traditional"), nb::arg("base"), nb::arg("scale"),
        nb::arg("offset"), nb::arg("freqs").none() = nb::none());
  m.def("attention", &attention, nb::arg("queries"), nb::arg("keys"), nb::arg("values"), nb::arg("scale"),
        nb::arg("causal"), nb::arg("mask").none() = nb::none(), nb::arg("packed_keys") = Arrays(),
        nb::arg("packed_values") = Arrays(), nb::arg("num_packed") = 0);
  nb::class_<Layer>(m, "Layer")
      .def(nb::init<std::vector<Arrays>, std::vector<int>, std::vector<int>, std::vector<bool>, Arrays, Arrays, float,
                    float, int, int, int, bool, float, float, const std::optional<mx::array>&>(),
           nb::arg("weights"), nb::arg("groups"), nb::arg("bits"), nb::arg("biased"), nb::arg("norms"),
           nb::arg("head_norms"), nb::arg("eps"), nb::arg("head_eps"), nb::arg("heads"), nb::arg("shared"),
           nb::arg("dims"), nb::arg("traditional"), nb::arg("base"), nb::arg("scale"),
           nb::arg("freqs").none() = nb::none())
      .def("ask", &Layer::asked, nb::arg("x"), nb::arg("offset"))
      .def("rest", &Layer::rest_of, nb::arg("x"), nb::arg("attended"));
  m.def("set_num_threads", [](int n) { Pool::shared().set_num_threads(n); }, nb::arg("n"));
}

} // namespace treadle
