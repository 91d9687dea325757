// Prints greedy text of a model, using only llama.h, to test `macko run` with a program without code for ggml-macko.
// usage: run-llama MODEL N_TOKENS PROMPT [SPLIT_MODE]
#include "llama.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(int argc, char ** argv) {
    if (argc != 4 && argc != 5) {
        fprintf(stderr, "usage: %s MODEL N_TOKENS PROMPT [SPLIT_MODE]\n", argv[0]);
        return 1;
    }
    llama_backend_init();
    struct llama_model_params model_params = llama_model_default_params();
    if (argc == 5) {
        model_params.split_mode = (enum llama_split_mode)atoi(argv[4]);
    }
    struct llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) {
        fprintf(stderr, "error: cannot load %s\n", argv[1]);
        return 1;
    }
    struct llama_context_params params = llama_context_default_params();
    params.n_ctx                       = 512;
    params.n_threads = params.n_threads_batch = 2;
    struct llama_context *     ctx            = llama_init_from_model(model, params);
    const struct llama_vocab * vocab          = llama_model_get_vocab(model);

    llama_token tokens[256];
    int         n = llama_tokenize(vocab, argv[3], (int)strlen(argv[3]), tokens, 256, true, false);
    for (int i = 0; i < atoi(argv[2]); i++) {
        if (n < 1 || llama_decode(ctx, llama_batch_get_one(tokens, n))) {
            fprintf(stderr, "error: decode failed\n");
            return 1;
        }
        const float * logits = llama_get_logits_ith(ctx, -1);
        llama_token   best   = 0;
        for (llama_token t = 1; t < llama_vocab_n_tokens(vocab); t++) {
            best = logits[t] > logits[best] ? t : best;
        }
        char      piece[64];
        const int length = llama_token_to_piece(vocab, best, piece, sizeof(piece), 0, true);
        fwrite(piece, 1, length > 0 ? (size_t)length : 0, stdout);
        tokens[0] = best;
        n         = 1;
    }
    llama_free(ctx);
    llama_model_free(model);
    llama_backend_free();
    return 0;
}
