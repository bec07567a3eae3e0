// Products in bfloat16 by tile registers (AMX): y [rows, columns] = x [rows, depth] * packed, on the panels of gemm.h.
//
// A register adds up 32 depths in an order of its own, other than that of vectors. So tiles multiply any number of rows,
// also a single one: with few rows the weights are read no faster by vectors. A row's result depends on this row alone,
// bit for bit: runs of 32 depths are added up from first to last, however rows and depths are divided into blocks.
#pragma once
#include <omp.h>

#include <algorithm>
#include <vector>

#include "gemm.h"
#include "tile_registers.h"

namespace kvrelay {

#if defined(KVRELAY_TILES)

constexpr int64_t kRunSize = kRunDepths * kPanel;  // elements of a panel
constexpr int64_t kMostRuns = 18;                  // of two tiles of rows, that stay in the first cache: 36 KiB
constexpr int64_t kGroupBytes = 640 << 10;         // of weights that stay in the second
constexpr int64_t kMostPanels = 16, kLeastPanels = 4;
constexpr int64_t kTilePrefetch = 4 * kRunSize;

// Rows copied for the registers: [tile][run][rows of a tile][32 depths], zero beyond the last row and depth.
class TiledRows {
public:
    TiledRows(int64_t rows, int64_t depth, bf16* memory)
        : rows_(rows), depth_(depth), runs_(num_runs<bf16>(depth)), tile_rows_(rows_per_tile(rows)), memory_(memory) {}

    static int64_t rows_per_tile(int64_t rows) { return rows < kTiledRows ? rows : rows_per_pass(rows, kTiledRows); }
    static int64_t size(int64_t rows, int64_t depth) {
        return (rows + kTiledRows) * num_runs<bf16>(depth) * kRunDepths;
    }

    int64_t tile_rows() const { return tile_rows_; }
    int64_t tiles() const { return (rows_ + tile_rows_ - 1) / tile_rows_; }
    int64_t runs() const { return runs_; }
    int64_t rows() const { return rows_; }
    int64_t rows_of(int64_t t) const { return std::min(tile_rows_, rows_ - t * tile_rows_); }
    bf16* tile(int64_t t, int64_t run) const { return memory_ + (t * runs_ + run) * tile_rows_ * kRunDepths; }

    // Fill in tile t from x [rows][depth]. Tiles may be filled by several threads.
    void fill(const bf16* x, int64_t t) const {
        for (int64_t run = 0; run < runs_; run++) {
            bf16* to = tile(t, run);
            int64_t count = std::min<int64_t>(depth_ - run * kRunDepths, kRunDepths);
            for (int64_t r = t * tile_rows_; r < (t + 1) * tile_rows_; r++, to += kRunDepths) {
                if (r >= rows_ || count < kRunDepths) std::memset((void*)to, 0, kRunDepths * sizeof(bf16));
                if (r < rows_) std::memcpy(to, x + r * depth_ + run * kRunDepths, count * sizeof(bf16));
            }
        }
    }

private:
    int64_t rows_, depth_, runs_, tile_rows_;
    bf16* memory_;
};

// Sums of one tile of rows with one panel, [kTiledRows][kPanel].
typedef float TileSums[kTiledRows][kPanel];

// Runs [begin, end), which are added to sums that begin anew with run `origin`.
struct Runs {
    int64_t begin, end, origin;
};

// Add to one tile's sums, or to two tiles', the products of some runs. panel(run): a run's weights.
template <int kTiles, typename Panel>
inline void add_runs(const TiledRows& x, int64_t t, Runs runs, Panel panel, TileSums* sums) {
    constexpr int kStride = kPanel * sizeof(float), kPanelStride = 2 * kPanel * sizeof(bf16);
    int64_t row_bytes = kRunDepths * sizeof(bf16);
    if (runs.begin == runs.origin) {
        _tile_zero(0);
        _tile_zero(1);
        if (kTiles == 2) _tile_zero(2);
        if (kTiles == 2) _tile_zero(3);
    } else {
        _tile_loadd(0, sums[0][0], kStride);
        _tile_loadd(1, sums[0][0] + kLanes, kStride);
        if (kTiles == 2) _tile_loadd(2, sums[1][0], kStride);
        if (kTiles == 2) _tile_loadd(3, sums[1][0] + kLanes, kStride);
    }
    for (int64_t run = runs.begin; run < runs.end; run++) {
        const bf16* weights = panel(run);
        _tile_loadd(4, x.tile(t, run), row_bytes);
        _tile_loadd(6, weights, kPanelStride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + 2 * kLanes, kPanelStride);
        _tile_dpbf16ps(1, 4, 7);
        if (kTiles == 2) {
            _tile_loadd(5, x.tile(t + 1, run), row_bytes);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0][0], kStride);
    _tile_stored(1, sums[0][0] + kLanes, kStride);
    if (kTiles == 2) _tile_stored(2, sums[1][0], kStride);
    if (kTiles == 2) _tile_stored(3, sums[1][0] + kLanes, kStride);
}

// Add the products of tile t, and of the next one if there is one. Returns whether there is.
template <typename Panel>
inline bool add_runs(const TiledRows& x, int64_t t, Runs runs, Panel panel, TileSums* sums) {
    bool is_pair = t + 1 < x.tiles();
    is_pair ? add_runs<2>(x, t, runs, panel, sums) : add_runs<1>(x, t, runs, panel, sums);
    return is_pair;
}

// A panel in memory, as tiles take it.
struct PanelInMemory {
    const bf16* operator()(int64_t run) const {
        const bf16* weights = panel + run * kRunSize;
        for (int64_t at = 0; at < kRunSize; at += 2 * kLanes) __builtin_prefetch(weights + kTilePrefetch + at);
        return weights;
    }
    const bf16* panel;
};

// Weights all of whose panels lie in memory.
class PlainPanels {
public:
    PlainPanels(const bf16* packed, int64_t depth) : packed_(packed), size_(num_runs<bf16>(depth) * kRunSize) {}

    // Make tile t of the rows ready. Plain weights are multiplied with them as they are.
    void prepare(const TiledRows&, int64_t) const {}

    // `add_runs` with panel p, the `idx`th of those that are multiplied with all rows before the next ones.
    bool multiply(const TiledRows& x, int64_t t, Runs runs, int64_t p, int64_t, TileSums* sums) const {
        return add_runs(x, t, runs, PanelInMemory{packed_ + p * size_}, sums);
    }

private:
    const bf16* packed_;
    int64_t size_;
};

// Add a segment's sums of tiles to those of the segments before.
inline void add_tiles(int64_t tiles, const TileSums* sums, int64_t segment, TileSums* totals) {
    for (int64_t i = 0; i < tiles; i++)
        for (int r = 0; r < kTiledRows; r++)
            for (int c = 0; c < kPanel; c += kLanes) {
                F32x16 added = load<F32x16>(sums[i][r] + c);
                store(totals[i][r] + c, (segment ? load<F32x16>(totals[i][r] + c) : F32x16{}) + added);
            }
}

// The product's panels from `panel` to `end`, of copied rows. A segment has whole runs. Y is bf16 or wider.
template <typename Panels, typename Y>
void multiply_panels(const TiledRows& x, const Panels& weight, const bf16* bias, Y* y, int64_t columns, int64_t panel,
                     int64_t end, Segments segments) {
    static thread_local std::vector<F32x16> scratch(2 * kMostPanels * 2 * sizeof(TileSums) / sizeof(F32x16));
    auto *sums = (TileSums(*)[2])scratch.data(), *totals = sums + kMostPanels;
    int64_t bytes = x.runs() * kRunSize * sizeof(bf16), length = x.runs() / segments.count;
    int64_t blocks = (length + kMostRuns - 1) / kMostRuns;
    auto store_tiles = [&](const TileSums* from, const bf16* added, int64_t t, int64_t tiles, Y* to, int64_t p) {
        for (int64_t i = 0; i < tiles; i++)
            for (int64_t r = 0, row = (t + i) * x.tile_rows(); r < x.rows_of(t + i); r++, row++) {
                F32x16 both[2] = {load<F32x16>(from[i][r]), load<F32x16>(from[i][r] + kLanes)};
                store_sums(both, added, to + row * columns, columns, p * kPanel);
            }
    };
    int64_t together = std::clamp(kGroupBytes / bytes, kLeastPanels, kMostPanels);
    asm volatile("" ::: "memory");  // tiles are loaded behind the compiler's back
    for (; panel < end; panel += together)
        for (int64_t t = 0; t < x.tiles(); t += 2)
            for (int64_t block = 0; block < segments.count * blocks; block++) {
                int64_t segment = block / blocks, part = block % blocks, first = segment * length;
                Runs runs{first + part * length / blocks, first + (part + 1) * length / blocks, first};
                for (int64_t p = panel; p < std::min(panel + together, end); p++) {
                    TileSums *to = sums[p - panel], *total = totals[p - panel];
                    int64_t tiles = 1 + weight.multiply(x, t, runs, p, p - panel, to);
                    if (part + 1 < blocks) continue;
                    asm volatile("" ::: "memory");
                    if (segments.are_apart) {
                        store_tiles(to, nullptr, t, tiles, y + segment * x.rows() * columns, p);
                        continue;
                    }
                    if (segments.count > 1) add_tiles(tiles, to, segment, total);
                    if (segment + 1 == segments.count)
                        store_tiles(segments.count > 1 ? total : to, bias, t, tiles, y, p);
                }
            }
}

// Rows of this many elements in all are copied by every thread for itself, which costs less than waiting for another.
constexpr int64_t kCopiedAlone = 8192;

// Copy rows x [rows][depth], let `prepare(copy, tile)` do more to each tile, and let each thread `multiply(copy, thread,
// threads)`. All threads.
template <typename Prepare, typename Multiply>
void with_tiled_rows(const bf16* x, int64_t rows, int64_t depth, Prepare prepare, Multiply multiply) {
    static thread_local std::vector<F32x16> memory;
    auto reserve = [&] {
        size_t size = TiledRows::size(rows, depth) * sizeof(bf16) / sizeof(F32x16);
        if (memory.size() < size) memory.resize(size);
        return (bf16*)memory.data();
    };
    bool is_alone = rows * depth <= kCopiedAlone;
    bf16* shared = is_alone ? nullptr : reserve();
#pragma omp parallel
    {
        TiledRows tiled(rows, depth, is_alone ? reserve() : shared);
        auto copy = [&](int64_t t) { tiled.fill(x, t), prepare(tiled, t); };
        if (is_alone) {
            for (int64_t t = 0; t < tiled.tiles(); t++) copy(t);
        } else {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tiled.tiles(); t++) copy(t);
        }
        multiply(tiled, int64_t(omp_get_thread_num()), int64_t(omp_get_num_threads()));
    }
}

// y [rows, columns] = x [rows, depth] * weight (+ bias). Both sides' rows are contiguous; Y is T or wider. All threads.
template <typename Panels, typename Y>
void tiled_linear(const bf16* x, const Panels& weight, const bf16* bias, Y* y, int64_t rows, int64_t columns,
                  int64_t depth, Segments segments = {}) {
    auto prepare = [&](const TiledRows& tiled, int64_t t) { weight.prepare(tiled, t); };
    with_tiled_rows(x, rows, depth, prepare, [&](const TiledRows& tiled, int64_t thread, int64_t threads) {
        Tiles registers(int(tiled.tile_rows()), kLanes);
        int64_t panels = (columns + kPanel - 1) / kPanel;
        int64_t begin = thread * panels / threads, end = (thread + 1) * panels / threads;
        multiply_panels(tiled, weight, bias, y, columns, begin, end, segments);
    });
}

#endif

}  // namespace kvrelay
