// The C interface of the kernels; `library.py` declares it to Python. Suffixes name the number format.
#include "delta.h"
#include "draw.h"
#include "layer.h"
#include "mamba.h"

using namespace kvrelay;

template <typename T>
static void pack(const T* weight, T* packed, int64_t columns, int64_t depth) {
    int64_t size = panel_size<T>(depth);
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < (columns + kPanel - 1) / kPanel; p++)
        pack_transposed(weight, depth, columns, depth, packed + p * size, p);
}

#define KVRELAY_KERNELS(T, suffix)                                                                                     \
    int64_t kvrelay_packed_size_##suffix(int64_t columns, int64_t depth) {                                             \
        return (columns + kPanel - 1) / kPanel * panel_size<T>(depth);                                                 \
    }                                                                                                                  \
    void kvrelay_pack_##suffix(const T* weight, T* packed, int64_t columns, int64_t depth) {                           \
        pack(weight, packed, columns, depth);                                                                          \
    }                                                                                                                  \
    void kvrelay_linear_##suffix(const Projection<T>* projection, const T* x, T* y, int64_t rows) {                    \
        (*projection)(x, y, rows);                                                                                     \
    }                                                                                                                  \
    void kvrelay_wide_linear_##suffix(const Projection<T>* projection, const T* x, float* y, int64_t rows) {           \
        (*projection)(x, y, rows);                                                                                     \
    }                                                                                                                  \
    void kvrelay_gather_columns_##suffix(                                                                              \
        const Projection<T>* projection, Ranks* ranks, const T* x, float* y, int64_t rows, int64_t columns) {          \
        gather_columns(*projection, *ranks, x, y, rows, columns);                                                      \
    }                                                                                                                  \
    void kvrelay_rms_norm_##suffix(const T* x, const float* weight, T* to, int64_t rows, int64_t size, float eps) {    \
        rms_norm(x, weight, to, rows, size, eps);                                                                      \
    }                                                                                                                  \
    void kvrelay_add_rms_norm_##suffix(                                                                                \
        const T* x, T* residual, const float* weight, T* to, int64_t rows, int64_t size, float eps) {                  \
        add_rms_norm(x, residual, weight, to, rows, size, eps);                                                        \
    }                                                                                                                  \
    void kvrelay_gate_mul_##suffix(Activation activation, const T* gate_up, T* to, int64_t rows, int64_t size) {       \
        gate_mul(activation, gate_up, to, rows, size);                                                                 \
    }                                                                                                                  \
    void kvrelay_attend_##suffix(const Step* step, const Layer<T>* layer, T* qkv, T* output) {                         \
        attend(*step, *layer, qkv, output);                                                                            \
    }                                                                                                                  \
    void kvrelay_gate_heads_##suffix(T* heads, const T* gates, int64_t rows, int64_t size) {                           \
        gate_heads(heads, gates, rows, size);                                                                          \
    }                                                                                                                  \
    void kvrelay_run_delta_##suffix(                                                                                   \
        const Step* step, const States* states, const Delta* delta, const T* projected, T* output) {                   \
        run_delta(*step, *states, *delta, projected, output);                                                          \
    }                                                                                                                  \
    void kvrelay_run_mamba_##suffix(const Step* step, const States* states, const Mamba* mamba, const T* projected,    \
                                    T* output, const MambaScratch* scratch) {                                          \
        run_mamba(*step, *states, *mamba, projected, output, *scratch);                                                \
    }                                                                                                                  \
    void kvrelay_run_layer_##suffix(                                                                                   \
        const Step* step, const Layer<T>* pages, const LayerWeights<T>* weights, const Activations<T>* to) {           \
        run_layer(*step, pages, *weights, *to);                                                                       \
    }

#pragma GCC visibility push(default)
extern "C" {
int64_t kvrelay_codes_size(int64_t columns, int64_t depth, int64_t bits) {
    return num_panels(columns) * num_blocks(depth) * grouped_block_bytes(bits);
}
void kvrelay_pack_codes(
    const uint8_t* codes, uint8_t* packed, int64_t columns, int64_t depth, int64_t bits, int64_t in_tiles) {
    auto pack_panel = in_tiles ? pack_tiled_codes : pack_vector_codes;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < num_panels(columns); p++) pack_panel(codes, columns, depth, bits, packed, p);
}
void kvrelay_draw(const Draws* draws) { draw(*draws); }
// OpenMP keeps this setting for each thread that starts parallel work.
void kvrelay_use_threads(int64_t count) { omp_set_num_threads(int(count)); }
bool kvrelay_has_tiles() { return has_tiles(); }
void kvrelay_abort_ranks(Ranks* ranks) { ranks->shared->is_aborted.value = 1; }
bool kvrelay_is_aborted(Ranks* ranks) { return ranks->shared->is_aborted.value; }
int64_t kvrelay_shared_size(int64_t buffer_size) { return sizeof(SharedCounts) + 2 * buffer_size * sizeof(float); }
int64_t kvrelay_num_threads() { return omp_get_max_threads(); }
KVRELAY_KERNELS(float, float32)
KVRELAY_KERNELS(bf16, bfloat16)
}
#pragma GCC visibility pop
