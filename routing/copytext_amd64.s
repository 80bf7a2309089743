#include "textflag.h"

// CONSTANTS fills X1 to X3 for MARKS. They are in the code, as a table of them would be one more line of memory to wait for.
#define CONSTANTS \
	MOVL   $0x5c5c5c5c, AX \ // '\\'
	MOVQ   AX, X1          \
	PSHUFL $0, X1, X1      \
	MOVL   $0x02020202, AX \
	MOVQ   AX, X2          \
	PSHUFL $0, X2, X2      \
	MOVL   $0x21212121, AX \
	MOVQ   AX, X3          \
	PSHUFL $0, X3, X3

// MARKS sets a bit of AX for each byte of X0 that ends a run of plain text, as func special does. Flipping bit 1 moves '"'
// to 0x20, next to the control characters, and as signed numbers all that is not ASCII is below them: one comparison has the three.
#define MARKS \
	MOVO     X0, X4 \
	MOVO     X3, X5 \
	PXOR     X2, X0 \
	PCMPEQB  X1, X4 \
	PCMPGTB  X0, X5 \
	POR      X4, X5 \
	PMOVMSKB X5, AX

// func copyText(dst, src []byte) (n, i int)
//
// SI is src+i and DI is dst+n. R8 is src+last: up to there 16 bytes may be read at SI and written at DI, and one byte behind them
// be read, see textStep. A mark is at most 15 further on; so an escape that begins there ends with the last byte of src.
TEXT ·copyText(SB), NOSPLIT, $0-64
	MOVQ    dst_base+0(FP), DI
	MOVQ    dst_len+8(FP), DX
	MOVQ    src_base+24(FP), SI
	MOVQ    src_len+32(FP), R8
	MOVQ    DI, R10
	MOVQ    SI, R11
	CMPQ    R8, DX
	CMOVQGT DX, R8
	SUBQ    $17, R8 // textStep
	JLT     done
	ADDQ    SI, R8
	LEAQ    ·escapes(SB), R9
	CONSTANTS
	JMP     copy

plain:
	ADDQ $16, SI
	ADDQ $16, DI

next:
	CMPQ SI, R8
	JHI  done

copy:
	MOVOU   (SI), X0
	MOVOU   X0, (DI)
	MARKS
	TESTL   AX, AX
	JEQ     plain
	BSFL    AX, AX
	MOVBLZX (SI)(AX*1), BX
	CMPL    BX, $'\\'
	JNE     other

escape: // at SI+AX
	MOVBLZX 1(SI)(AX*1), BX
	MOVBLZX (R9)(BX*1), BX
	TESTL   BX, BX
	JEQ     stop
	MOVB    BX, (DI)(AX*1)
	LEAQ    2(SI)(AX*1), SI
	LEAQ    1(DI)(AX*1), DI
	CMPQ    SI, R8
	JHI     done

	// Escapes come in runs, as at the end of a line of source code, which takes 0.6 of the time when one byte is looked at before 16.
	XORL AX, AX
	CMPB (SI), $'\\'
	JEQ  escape
	JMP  copy

other:
	ADDQ AX, SI
	ADDQ AX, DI
	CMPL BX, $0xe1
	JCS  done

	// Characters of three bytes.
wide:
	CMPQ SI, R8
	JHI  narrow
	MOVL (SI), BX
	MOVL BX, CX
	ANDL $0xc0c0f0, CX
	CMPL CX, $0x8080e0
	JNE  narrow
	CMPB BX, $0xe0
	JEQ  narrow
	CMPB BX, $0xed
	JEQ  narrow
	MOVL BX, (DI)
	ADDQ $3, SI
	ADDQ $3, DI
	JMP  wide

narrow:
	CMPB (SI), $0x80
	JCS  next
	JMP  done

stop:
	ADDQ AX, SI
	ADDQ AX, DI

done:
	SUBQ R10, DI
	MOVQ DI, n+48(FP)
	SUBQ R11, SI
	MOVQ SI, i+56(FP)
	RET

// func plainBlocks(src []byte) int
TEXT ·plainBlocks(SB), NOSPLIT, $0-32
	MOVQ src_base+0(FP), SI
	MOVQ src_len+8(FP), R8
	MOVQ SI, R11
	SUBQ $17, R8 // textStep
	JLT  end
	ADDQ SI, R8
	CONSTANTS

block:
	MOVOU (SI), X0
	MARKS
	TESTL AX, AX
	JNE   mark
	ADDQ  $16, SI
	CMPQ  SI, R8
	JLS   block
	JMP   end

mark:
	BSFL AX, AX
	ADDQ AX, SI

end:
	SUBQ R11, SI
	MOVQ SI, ret+24(FP)
	RET
