// Decoded frames (NV12) to rows of an engine's input: colours, resize, padding or crop, normalisation, layout, dtype.
//
// The arithmetic is that of FFmpeg's `yuv2rgb` on x86 (chroma is repeated, products keep 16 bits) and of Pillow's `resize`
// (8 bits between the passes, weights of 22 bits), in integers: equal to `Preprocessor` on frames that PyAV decoded.
//
// Compiled with VALUE (the integer as wide as an element of the input), WIDE, TALL, CHANNELS, PAD (a level for each
// channel), and where it applies LAST (channels last), BGR or GREY.

struct Frame {
    const unsigned char *luma;  // [height, width], then chroma [height / 2, width]
    const int *plan;            // 10 numbers, then for x and for y: first taps, counts, weights
};

__device__ int level(int sum) {
    sum >>= 22;
    return sum < 0 ? 0 : sum > 255 ? 255 : sum;
}

extern "C" __global__ void prepare_frames(const Frame *frames, const VALUE *levels, VALUE *rows) {
    const int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    if (x >= WIDE || y >= TALL) return;
    const Frame frame = frames[blockIdx.z];
    const int *plan = frame.plan;
    const int scale = plan[0], red_v = plan[1], green_u = plan[2], green_v = plan[3], blue_u = plan[4], black = plan[5];
    const int width = plan[6], height = plan[7], taps_x = plan[8], taps_y = plan[9];
    const int *first_x = plan + 10, *count_x = first_x + WIDE, *weights_x = count_x + WIDE + x * taps_x;
    const int *first_y = count_x + WIDE + WIDE * taps_x, *count_y = first_y + TALL, *weights_y = count_y + TALL + y * taps_y;
    const unsigned char *chroma = frame.luma + (long long)width * height;
    int found[CHANNELS] = PAD;
    if (count_x[x] > 0 && count_y[y] > 0) {
        int sums[CHANNELS];
        for (int c = 0; c < CHANNELS; ++c) sums[c] = 1 << 21;
        for (int j = 0; j < count_y[y]; ++j) {
            const int row = first_y[y] + j;
            const unsigned char *lumas = frame.luma + (long long)row * width;
            const unsigned char *chromas = chroma + (long long)(row >> 1) * width;
            int line[CHANNELS];
            for (int c = 0; c < CHANNELS; ++c) line[c] = 1 << 21;
            for (int i = 0; i < count_x[x]; ++i) {
                const int column = first_x[x] + i, weight = weights_x[i];
                const int grey = ((lumas[column] - black) * 8 * scale) >> 16;
                const int u = (chromas[column & ~1] - 128) * 8, v = (chromas[column | 1] - 128) * 8;
                int rgb[3] = {grey + ((v * red_v) >> 16), grey + ((u * green_u) >> 16) + ((v * green_v) >> 16),
                              grey + ((u * blue_u) >> 16)};
                for (int c = 0; c < 3; ++c) rgb[c] = rgb[c] < 0 ? 0 : rgb[c] > 255 ? 255 : rgb[c];
#ifdef GREY
                line[0] += weight * ((rgb[0] * 19595 + rgb[1] * 38470 + rgb[2] * 7471 + 0x8000) >> 16);
#else
                for (int c = 0; c < CHANNELS; ++c) line[c] += weight * rgb[c];
#endif
            }
            for (int c = 0; c < CHANNELS; ++c) sums[c] += weights_y[j] * level(line[c]);
        }
        for (int c = 0; c < CHANNELS; ++c) {
#ifdef BGR
            found[CHANNELS - 1 - c] = level(sums[c]);
#else
            found[c] = level(sums[c]);
#endif
        }
    }
    VALUE *image = rows + (long long)blockIdx.z * CHANNELS * WIDE * TALL;
    for (int c = 0; c < CHANNELS; ++c) {
#ifdef LAST
        image[((long long)y * WIDE + x) * CHANNELS + c] = levels[c * 256 + found[c]];
#else
        image[((long long)c * TALL + y) * WIDE + x] = levels[c * 256 + found[c]];
#endif
    }
}
